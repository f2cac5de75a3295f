"""Execution of a rank's program: mesh, collectives, sharded parameters. Imports torch only."""

if __name__ != "autoshard.runtime":
    raise ImportError(f"import this package as 'autoshard.runtime', not {__name__!r}")
