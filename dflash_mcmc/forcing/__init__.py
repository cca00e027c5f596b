"""Teacher forcing of whole sequences, token trees and layers in one forward. Probes use it; engines do not import it."""
