"""Every command of EcoSpec: the only package that reads ``argv``, writes to the terminal or exits."""
