"""Targets: any transformers causal language model, and the embedded one."""
