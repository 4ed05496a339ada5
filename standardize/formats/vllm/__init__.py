"""vLLM's ExampleHiddenStatesConnector."""
