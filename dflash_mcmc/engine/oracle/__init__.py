"""An enumerable toy model, and the law of a token in float64: what tests and audits compare with."""
