"""`mla-backend generate`: reads prompts, and writes each result as a line of JSON when it is finished.

| file | subject |
|---|---|
| `options.py` | the command line |
| `prompts.py` | reading prompts, the lines of OpenAI's batch requests among them |
| `results.py` | the lines that are written, and resuming a file of them |
| `run.py` | the loop around the engine, with its progress bar |
"""
