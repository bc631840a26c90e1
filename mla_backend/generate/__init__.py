"""`mla-backend generate`: reads prompts, and writes each result when it is finished, as a line of JSON or as text.

| file | subject |
|---|---|
| `options.py` | the command line |
| `prompts.py` | reading prompts, the lines of OpenAI's batch requests among them |
| `results.py` | what is written, and resuming a file of it |
| `run.py` | the loop around the engine, with its progress bar |
"""
