"""Plans prefix-shared training: integers in, frozen dataclasses out (numpy only)."""
