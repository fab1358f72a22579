"""The programs that kvoy is compared with: how each is installed (recipes, install), what it is given to run
(model_files), and the process that runs it (process, drivers). Knows nothing of what is measured.
"""
