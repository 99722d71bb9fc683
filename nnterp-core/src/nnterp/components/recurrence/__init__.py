"""Recurrent mixers: what they compute from, what they hold, and what that amounts to."""
