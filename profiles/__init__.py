"""Profiles that come with budgetdb: JSON, one file for each device."""
