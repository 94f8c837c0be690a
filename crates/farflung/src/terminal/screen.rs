//! The terminal at stderr as the target of a progress bar.

use std::io;
use std::sync::{Mutex, PoisonError};

use indicatif::TermLike;

/// Collects drawing output until it is flushed.
#[derive(Debug, Default)]
pub(crate) struct Screen {
    drawn: Mutex<String>,
}

/// Columns and rows of a terminal whose size is unknown.
const USUAL: (u16, u16) = (80, 24);

/// Returns the columns and rows of the terminal.
fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(super::stderr()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => USUAL,
    }
}

impl Screen {
    /// Appends a text unchanged.
    fn draw(&self, text: &str) {
        self.drawn.lock().unwrap_or_else(PoisonError::into_inner).push_str(text);
    }

    /// Appends the escape sequence that moves the cursor: A up, B down, C right, D left.
    fn go(&self, by: usize, letter: char) {
        if by > 0 {
            self.draw(&format!("\x1b[{by}{letter}"));
        }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        size().0
    }
    fn height(&self) -> u16 {
        size().1
    }
    fn move_cursor_up(&self, by: usize) -> io::Result<()> {
        self.go(by, 'A');
        Ok(())
    }
    fn move_cursor_down(&self, by: usize) -> io::Result<()> {
        self.go(by, 'B');
        Ok(())
    }
    fn move_cursor_right(&self, by: usize) -> io::Result<()> {
        self.go(by, 'C');
        Ok(())
    }
    fn move_cursor_left(&self, by: usize) -> io::Result<()> {
        self.go(by, 'D');
        Ok(())
    }
    fn write_line(&self, text: &str) -> io::Result<()> {
        self.draw(text);
        self.draw("\n");
        Ok(())
    }
    fn write_str(&self, text: &str) -> io::Result<()> {
        self.draw(text);
        Ok(())
    }
    fn clear_line(&self) -> io::Result<()> {
        self.draw("\r\x1b[2K");
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        let drawn = std::mem::take(&mut *self.drawn.lock().unwrap_or_else(PoisonError::into_inner));
        if !drawn.is_empty() {
            super::draw(drawn);
        }
        Ok(())
    }
}
