"""The slow external service that shows ads. In real life it would belong to another company."""
