"""A draft that learns while it is used: low-rank changes of its projections, and the steps that train them."""
