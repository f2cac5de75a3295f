"""What several passes, or one large pass, know of a graph; no pass itself."""
