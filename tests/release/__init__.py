"""The check of a release: what is built, and how it runs with the oldest and newest versions of its packages.

    artifacts.py      wheel and source distribution: made by `python -m build`, compared with the checkout's files
    environments.py   virtual environments with the oldest allowed versions, or the newest, for each Python
    walk.py           commands of a stranger who has the wheel alone, and the tests that versions can break
    __main__.py       all of it, and a table
"""
