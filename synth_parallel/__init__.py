"""Another name of the package synth, as requirement documents write it."""
