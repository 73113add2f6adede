"""Commands about this installation: doctor, completion."""
