"""Graph documents: written by the frontends, derived, cut into kernels; of no framework."""
