"""Prefix-sharing operators, one a module, from its public function to its backward."""
