"""Pictures and tables of one emulation: `pages.write` makes them. These questions they answer."""

# What there is of each case, in the order of reading: name, and the question that it answers.
PICTURES = {
    "breakdown": "Where does the time go?",
    "pipeline": "What does each stage do, and when?",
    "memory": "What holds the memory?",
    "bandwidth": "How fast is communication?",
}
TABLES = {
    "trust": "How far can this be trusted?",
    "roles": "Who was run, and for whom does it stand?",
    "anomalies": "What deviates?",
}
# In the order of a report.
QUESTIONS = {"trust": TABLES["trust"], **PICTURES, **TABLES}
# Of all cases together.
OVERVIEW = "How do the cases compare?"
