"""The check of a draft: is its acceptance what it should be, and if not, which known mistake explains it?"""
