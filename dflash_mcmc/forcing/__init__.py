"""Teacher forcing: whole sequences, token trees and layers in one forward. Probes read with it; engines never import it."""
