//! A JSON document read value by value through a window that moves over it.
//!
//! Values are parsed by `serde_json` in place. What is read here is only what stands between them:
//! brackets, commas, colons. The window grows to the longest single value and no further.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::error::Category;

use crate::timing::InputError;

/// The window's first size.
const WINDOW: usize = 1 << 20;
/// Longest single value: an event of a profile has a few hundred bytes, with long call stacks some
/// thousands.
const VALUE_MAX: usize = 64 << 20;

/// U+FEFF in UTF-8.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

pub(super) struct JsonStream<R> {
    file: PathBuf,
    source: R,
    window: Vec<u8>,
    /// Unread bytes of the window: from here to `filled`.
    at: usize,
    filled: usize,
    ended: bool,
    /// Why the source failed, to be reported when what came before it is used up.
    failed: Option<io::Error>,
    /// Bytes and line ends of the document before the window, and where its last line began.
    bytes_before: u64,
    lines_before: u64,
    line_start: u64,
}

/// One value from the head of `bytes`, which it may borrow from, and its length.
pub(super) fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> serde_json::Result<(T, usize)> {
    let mut values = serde_json::Deserializer::from_slice(bytes).into_iter::<T>();
    let value = values
        .next()
        .unwrap_or_else(|| Err(serde_json::Error::io(io::ErrorKind::UnexpectedEof.into())))?;
    Ok((value, values.byte_offset()))
}

impl<R: Read> JsonStream<R> {
    pub fn new(file: &Path, source: R) -> Self {
        Self {
            file: file.to_path_buf(),
            source,
            window: vec![0; WINDOW],
            at: 0,
            filled: 0,
            ended: false,
            failed: None,
            bytes_before: 0,
            lines_before: 0,
            line_start: 0,
        }
    }

    /// Reads past the byte order mark that some editors begin a file with.
    pub fn skip_byte_order_mark(&mut self) -> Result<(), InputError> {
        self.peek()?;
        if self.window[self.at..self.filled].starts_with(BYTE_ORDER_MARK) {
            self.at += BYTE_ORDER_MARK.len();
        }
        Ok(())
    }

    /// The next byte that is no white space, left unread; `None` at the end.
    pub fn peek(&mut self) -> Result<Option<u8>, InputError> {
        loop {
            while let Some(byte) = self.window[self.at..self.filled].first() {
                if !byte.is_ascii_whitespace() {
                    return Ok(Some(*byte));
                }
                self.at += 1;
            }
            if !self.refill()? {
                return Ok(None);
            }
        }
    }

    /// Reads past `byte` if it comes next.
    pub fn skip(&mut self, byte: u8) -> Result<bool, InputError> {
        let there = self.peek()? == Some(byte);
        self.at += usize::from(there);
        Ok(there)
    }

    /// Reads past `byte`, which must come next.
    pub fn expect(&mut self, byte: u8) -> Result<(), InputError> {
        if self.skip(byte)? {
            return Ok(());
        }
        if self.at == self.filled {
            return Err(self.end());
        }
        Err(self.fault_here(&format!("expected `{}`", char::from(byte))))
    }

    /// After an element of an array or object that `close` ends: whether another one follows.
    pub fn another(&mut self, close: u8) -> Result<bool, InputError> {
        if self.skip(b',')? {
            return Ok(true);
        }
        self.expect(close)?;
        Ok(false)
    }

    /// Nothing but white space may follow.
    pub fn done(&mut self) -> Result<(), InputError> {
        match self.peek()? {
            None => Ok(()),
            Some(_) => Err(self.fault_here("more text after the end")),
        }
    }

    /// A fault at the place that has been reached.
    pub fn fault_here(&self, what: &str) -> InputError {
        self.fault(self.at, what)
    }

    /// The next value; `None` where it is well-formed JSON but no `T`.
    pub fn value<T: DeserializeOwned>(&mut self) -> Result<Option<T>, InputError> {
        self.peek()?;
        let mut read = None;
        let fits = self.parsed(|bytes, whole| {
            let (value, length) = parse::<T>(bytes)?;
            // A number may go on behind the window.
            if length == bytes.len() && !whole {
                return Err(serde_json::Error::io(io::ErrorKind::UnexpectedEof.into()));
            }
            read = Some(value);
            Ok(length)
        })?;
        Ok(read.filter(|_| fits))
    }

    /// Hands the next value, an object, to `take` in place, which parses it with [`parse`] and
    /// returns its length. `take` is called again with more bytes where its parse met the end, so
    /// it must act only on a whole value. `false`: it is well-formed JSON but not what `take`
    /// parses.
    pub fn object(
        &mut self,
        mut take: impl FnMut(&[u8]) -> serde_json::Result<usize>,
    ) -> Result<bool, InputError> {
        self.parsed(|bytes, _| take(bytes))
    }

    fn parsed(
        &mut self,
        mut take: impl FnMut(&[u8], bool) -> serde_json::Result<usize>,
    ) -> Result<bool, InputError> {
        let mut fits = true;
        loop {
            let bytes = &self.window[self.at..self.filled];
            let taken = if fits {
                take(bytes, self.ended)
            } else {
                parse::<IgnoredAny>(bytes).map(|(_, length)| length)
            };
            match taken {
                Ok(length) => {
                    self.at += length;
                    return Ok(fits);
                }
                Err(error) => match error.classify() {
                    Category::Eof | Category::Io => {
                        if !self.refill()? {
                            self.at = self.filled;
                            return Err(self.end());
                        }
                    }
                    Category::Data => fits = false,
                    Category::Syntax => {
                        let inside = offset(bytes, error.line(), error.column());
                        let what = error.to_string();
                        let what = what.split(" at line ").next().unwrap_or(&what);
                        return Err(self.fault(self.at + inside, what));
                    }
                },
            }
        }
    }

    /// Drops what has been read and fills the window; `false`: there is no more.
    fn refill(&mut self) -> Result<bool, InputError> {
        if let Some(error) = self.failed.take() {
            self.ended = true;
            let read = self.bytes_before + self.filled as u64;
            return Err(InputError::new(
                &self.file,
                format!("cannot read on after byte {read} of the JSON text: {error}"),
                "the file is cut off or damaged: copy or export it again",
            ));
        }
        if self.ended {
            return Ok(false);
        }
        let passed = &self.window[..self.at];
        if let Some(last) = passed.iter().rposition(|byte| *byte == b'\n') {
            self.line_start = self.bytes_before + last as u64 + 1;
            self.lines_before += passed.iter().filter(|byte| **byte == b'\n').count() as u64;
        }
        self.bytes_before += self.at as u64;
        self.window.copy_within(self.at..self.filled, 0);
        self.filled -= self.at;
        self.at = 0;
        if self.filled == self.window.len() {
            if self.filled >= VALUE_MAX {
                return Err(self.fault(0, &format!("a value longer than {VALUE_MAX} bytes")));
            }
            self.window.resize(self.filled * 2, 0);
        }
        let before = self.filled;
        while self.filled < self.window.len() {
            match self.source.read(&mut self.window[self.filled..]) {
                Ok(0) => {
                    self.ended = true;
                    break;
                }
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.failed = Some(error);
                    break;
                }
            }
        }
        // At the end of the document a value that met the end of the window may still be whole.
        Ok(self.filled > before || self.ended || self.failed.is_some())
    }

    /// The document ends where it should not.
    fn end(&self) -> InputError {
        self.fault(self.filled, "the JSON text ends in the middle")
    }

    /// A fault at a position of the window.
    fn fault(&self, position: usize, what: &str) -> InputError {
        let before = &self.window[..position];
        let byte = self.bytes_before + position as u64;
        let lines = before.iter().filter(|byte| **byte == b'\n').count() as u64;
        let line_start = before
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(self.line_start, |last| self.bytes_before + last as u64 + 1);
        InputError::new(
            &self.file,
            format!("broken JSON: {what}, at byte {byte}"),
            "the file is cut off or damaged: copy or export it again",
        )
        .at(self.lines_before + lines + 1, byte - line_start + 1)
    }
}

/// Position in `bytes` of a line and column that count from one.
fn offset(bytes: &[u8], line: usize, column: usize) -> usize {
    let start: usize = bytes
        .split_inclusive(|byte| *byte == b'\n')
        .take(line.saturating_sub(1))
        .map(<[u8]>::len)
        .sum();
    (start + column.saturating_sub(1)).min(bytes.len())
}
