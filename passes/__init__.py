"""Graph passes: one a file; pipeline.py holds their order."""

if __name__ != "autoshard.passes":
    raise ImportError(f"import this package as 'autoshard.passes', not {__name__!r}")
