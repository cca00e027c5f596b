"""Scripts that run in processes of their own, behind walls. They import nothing of this project, and nothing imports them."""
