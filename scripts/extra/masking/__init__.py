"""Secrets and personal data out of chats, each replaced by a stand-in such as [EMAIL_1].

Kept libraries know most of them: detect-secrets the tokens of services, phonenumbers the
telephone numbers. A few own rules follow for forms that neither knows, and a function of the
user's. A rule finds spans of a text; what overlaps is masked as one. What was found anywhere
in a log is masked wherever it stands in it. Only what has a form is found: no rule reads
prose, and nobody looks for names of persons, addresses or dates.

`rules.py` has the rules, `needed.py` what spares most texts a search, `masker.py` what is found
and how it is replaced, `across.py` does that in all cores. None of it loads torch: every process
reads it anew.
"""
