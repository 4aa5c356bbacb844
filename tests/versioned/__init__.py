"""Models of every shape with a version, on three databases. Not an app of the project: see `shapes`."""
