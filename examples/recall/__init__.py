"""A tiny DeepSeek-V3.2 that recalls facts from its context: its task, its training, its checkpoint."""
