"""Drafts for a T5 of one's own, trained from prompts alone."""
