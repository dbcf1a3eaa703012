"""A zoo of models that the library was not written for: what each of them does in the Trainer, with every method and in a search."""
