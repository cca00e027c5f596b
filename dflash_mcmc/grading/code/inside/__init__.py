"""Scripts that run in separate processes of the sandbox. They import nothing from this project, and nothing imports them."""
