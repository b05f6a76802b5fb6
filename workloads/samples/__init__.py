"""Small traces made by `workloads.samples.make_samples`; none is taken from anywhere."""
