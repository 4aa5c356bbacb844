"""An app whose models and admin are those of a project with one package of other people."""
