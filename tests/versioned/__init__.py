"""Models of every shape with a version, on three databases. These are no app of the project (see `shapes`)."""
