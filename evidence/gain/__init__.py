"""Does RL raise a translation policy above one that SFT has trained to its end?"""
