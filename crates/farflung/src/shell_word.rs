//! Words of command lines, as they are printed for users and given to other machines' shells.

/// Returns a word as a POSIX shell reads it back. Quotes are added only where they are needed.
#[must_use]
pub fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_reads_a_word_as_it_is() {
        for word in ["/usr/bin/farflung", "it's $HOME", "a b;c", "\\", "", "~", "a*", "runs/é"] {
            let said =
                Command::new("sh").args(["-c", &format!("printf %s {}", shell_word(word))]).output().unwrap();
            assert_eq!(String::from_utf8(said.stdout).unwrap(), word);
        }
        assert_eq!(shell_word("runs/a-1"), "runs/a-1");
    }
}
