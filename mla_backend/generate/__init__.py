"""`mla-backend generate`: prompts from anywhere in, results as JSON lines out, as each finishes.

| file | subject |
|---|---|
| `options.py` | the command line |
| `prompts.py` | reading prompts, the lines of OpenAI's batch requests among them |
| `results.py` | the lines that are written, and going on with a file of them |
| `run.py` | the loop around the engine, its progress bar and its end |
"""
