"""Serve Qwen3.5/3.6 models with multi-token prediction on Ray Serve and vLLM."""

__version__ = "0.1.0"
