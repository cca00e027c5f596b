"""How draws are carried out: token by token, or block by block with a draft."""
