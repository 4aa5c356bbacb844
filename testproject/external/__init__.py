"""The slow external service that shows ads. In real life it would be somebody else's."""
