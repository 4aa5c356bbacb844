"""Orders, ads, and the export of ads to a slow external service."""
