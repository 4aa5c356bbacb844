"""An app with the models and the admin of a project with one package of other people."""
