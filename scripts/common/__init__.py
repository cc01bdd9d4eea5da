"""What several commands share: files, prompts, progress bars, finished parts of long runs."""
