"""The benchmarks of `millrace bench`: options and what they print. What measures is in `millrace/bench`."""
