"""The public face: OpenAI-compatible HTTP, gRPC, the step loop."""
