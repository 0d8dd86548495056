"""The pattern matcher: terms, matches, rules, and patterns traced from Python functions."""
