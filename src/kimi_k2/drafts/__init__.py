"""Draft models as they are published: Eagle3 heads (arXiv 2503.01840) beside a target, and n-grams without one."""
