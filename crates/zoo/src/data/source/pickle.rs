//! Reads Python's pickles of plain values: texts, numbers, lists and dictionaries. A pickle is a program; the
//! instructions that call functions or build objects are errors here, and nothing is executed.
//!
//! Source: the list of instructions in `Lib/pickletools.py` of Python's source, protocols 0 to 5.

use std::collections::BTreeMap;

/// A value of a pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    None,
    Int(i64),
    Text(String),
    Tuple(Vec<usize>),
    List(Vec<usize>),
    Dict(Vec<(usize, usize)>),
    /// A number that is not whole, or bytes.
    Other,
}

/// The values of a pickle. They refer to each other by index, so that a value which is used many times exists
/// once.
#[derive(Debug, Clone, Default)]
pub(super) struct Pickle {
    values: Vec<Value>,
    root: usize,
}

impl Pickle {
    /// Returns the value at the top.
    pub(super) fn root(&self) -> &Value {
        &self.values[self.root]
    }

    /// Returns the value of a dictionary's key that is this text.
    pub(super) fn get<'a>(&'a self, dict: &'a Value, key: &str) -> Option<&'a Value> {
        let Value::Dict(entries) = dict else { return None };
        let entry =
            entries.iter().rev().find(|(k, _)| matches!(&self.values[*k], Value::Text(t) if t == key));
        entry.map(|(_, value)| &self.values[*value])
    }

    /// Returns the keys and values of a dictionary.
    pub(super) fn entries<'a>(&'a self, dict: &'a Value) -> impl Iterator<Item = (&'a Value, &'a Value)> {
        let entries = if let Value::Dict(entries) = dict { &entries[..] } else { &[] };
        entries.iter().map(|(key, value)| (&self.values[*key], &self.values[*value]))
    }

    /// Returns the values of a list.
    pub(super) fn items<'a>(&'a self, list: &'a Value) -> impl Iterator<Item = &'a Value> {
        let items = if let Value::List(items) = list { &items[..] } else { &[] };
        items.iter().map(|item| &self.values[*item])
    }
}

/// What lies on the stack: the index of a value, or a mark.
#[derive(Debug, Clone, Copy)]
enum Slot {
    Value(usize),
    Mark,
}

/// A reader of the instructions, and the machine's state.
struct Machine<'a> {
    rest: &'a [u8],
    values: Vec<Value>,
    stack: Vec<Slot>,
    memo: BTreeMap<u64, usize>,
}

/// Reads a pickle.
///
/// Errors: a text that says what the pickle has that is no plain value, or that it is damaged.
pub(super) fn read(bytes: &[u8]) -> Result<Pickle, String> {
    let mut machine = Machine { rest: bytes, values: Vec::new(), stack: Vec::new(), memo: BTreeMap::new() };
    loop {
        let at = bytes.len() - machine.rest.len();
        let [op] = *machine.take(1)? else { return Err(cut()) };
        if op == b'.' {
            let root = machine.pop()?;
            return Ok(Pickle { values: machine.values, root });
        }
        machine.step(op).map_err(|problem| format!("{problem} (byte {at})"))?;
    }
}

fn cut() -> String {
    "the pickle ends too early".to_owned()
}

/// Returns a text of protocol 0: Latin-1, with other characters as `\u` or `\U` and 4 or 8 hexadecimal digits.
fn unescaped(line: &[u8]) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = line;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = match after.first() {
            Some(b'u') if byte == b'\\' => 4,
            Some(b'U') if byte == b'\\' => 8,
            _ => {
                text.push(char::from(byte));
                rest = after;
                continue;
            }
        };
        let hex = after.get(1..=digits).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        text.push(code.ok_or_else(|| "a text has a wrong escape".to_owned())?);
        rest = &after[1 + digits..];
    }
    Ok(text)
}

impl<'a> Machine<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or_else(cut)?;
        self.rest = rest;
        Ok(head)
    }

    /// Reads a little-endian number without sign.
    fn number(&mut self, bytes: usize) -> Result<u64, String> {
        Ok(self.take(bytes)?.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte)))
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let end = self.rest.iter().position(|&byte| byte == b'\n').ok_or_else(cut)?;
        let line = self.take(end + 1)?;
        std::str::from_utf8(&line[..end]).map_err(|_| "a line is not UTF-8".to_owned())
    }

    fn text(&mut self, length_bytes: usize) -> Result<Value, String> {
        let length = usize::try_from(self.number(length_bytes)?).map_err(|_| cut())?;
        let text = std::str::from_utf8(self.take(length)?);
        Ok(Value::Text(text.map_err(|_| "a text is not UTF-8".to_owned())?.to_owned()))
    }

    fn bytes(&mut self, length_bytes: usize) -> Result<Value, String> {
        let length = usize::try_from(self.number(length_bytes)?).map_err(|_| cut())?;
        self.take(length).map(|_| Value::Other)
    }

    fn push(&mut self, value: Value) {
        self.values.push(value);
        self.stack.push(Slot::Value(self.values.len() - 1));
    }

    fn pop(&mut self) -> Result<usize, String> {
        match self.stack.pop() {
            Some(Slot::Value(index)) => Ok(index),
            _ => Err("an instruction has no value to work on".to_owned()),
        }
    }

    /// Takes the values above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<usize>, String> {
        let mark = self.stack.iter().rposition(|slot| matches!(slot, Slot::Mark));
        let mark = mark.ok_or_else(|| "an instruction has no mark to work on".to_owned())?;
        let above = self.stack.split_off(mark);
        let index = |slot: Slot| if let Slot::Value(index) = slot { Some(index) } else { None };
        Ok(above.into_iter().filter_map(index).collect())
    }

    fn top(&self) -> Result<usize, String> {
        match self.stack.last() {
            Some(Slot::Value(index)) => Ok(*index),
            _ => Err("an instruction has no value to work on".to_owned()),
        }
    }

    fn remember(&mut self, key: u64) -> Result<(), String> {
        let top = self.top()?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: u64) -> Result<(), String> {
        let index = self.memo.get(&key).ok_or_else(|| format!("it uses its value {key} before it has it"))?;
        self.stack.push(Slot::Value(*index));
        Ok(())
    }

    fn set_items(&mut self, items: &[usize]) -> Result<(), String> {
        let top = self.top()?;
        let Value::Dict(entries) = &mut self.values[top] else {
            return Err("it sets an entry of what is no dictionary".to_owned());
        };
        let (pairs, rest) = items.as_chunks::<2>();
        entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
        if rest.is_empty() { Ok(()) } else { Err("a key has no value".to_owned()) }
    }

    fn append(&mut self, items: Vec<usize>) -> Result<(), String> {
        let top = self.top()?;
        let Value::List(list) = &mut self.values[top] else {
            return Err("it appends to what is no list".to_owned());
        };
        list.extend(items);
        Ok(())
    }

    fn decimal(&mut self) -> Result<Value, String> {
        let line = self.line()?;
        let line = line.strip_suffix('L').unwrap_or(line);
        line.parse().map(Value::Int).map_err(|_| format!("`{}` is no number", line.escape_debug()))
    }

    fn long(&mut self, length_bytes: usize) -> Result<Value, String> {
        let length = usize::try_from(self.number(length_bytes)?).map_err(|_| cut())?;
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let start = if negative { -1 } else { 0 };
        if length > 8 {
            return Err("a number has more than 64 bits".to_owned());
        }
        Ok(Value::Int(bytes.iter().rev().fold(start, |n, &byte| n << 8 | i64::from(byte))))
    }

    /// Returns the value of an instruction that makes one out of nothing; `None` for other instructions.
    fn value(&mut self, op: u8) -> Result<Option<Value>, String> {
        let value = match op {
            b'N' => Value::None,
            0x88 | 0x89 => Value::Int(i64::from(op == 0x88)),
            b'K' => Value::Int(self.number(1)?.cast_signed()),
            b'M' => Value::Int(self.number(2)?.cast_signed()),
            b'J' => Value::Int(i64::from((self.number(4)? as u32).cast_signed())),
            b'I' | b'L' => self.decimal()?,
            0x8a => self.long(1)?,
            0x8b => self.long(4)?,
            b'V' => {
                let end = self.rest.iter().position(|&byte| byte == b'\n').ok_or_else(cut)?;
                let line = self.take(end + 1)?;
                Value::Text(unescaped(&line[..end])?)
            }
            b'G' => self.take(8).map(|_| Value::Other)?,
            b'F' => self.line().map(|_| Value::Other)?,
            b'C' => self.bytes(1)?,
            b'B' => self.bytes(4)?,
            0x8e | 0x96 => self.bytes(8)?,
            0x8c => self.text(1)?,
            b'X' => self.text(4)?,
            0x8d => self.text(8)?,
            b'}' => Value::Dict(Vec::new()),
            b']' => Value::List(Vec::new()),
            b')' => Value::Tuple(Vec::new()),
            b'd' => {
                let items = self.pop_mark()?;
                Value::Dict(items.as_chunks::<2>().0.iter().map(|&[key, value]| (key, value)).collect())
            }
            b'l' => Value::List(self.pop_mark()?),
            b't' => Value::Tuple(self.pop_mark()?),
            0x85..=0x87 => {
                let mut items = Vec::new();
                for _ in 0..op - 0x84 {
                    items.insert(0, self.pop()?);
                }
                Value::Tuple(items)
            }
            _ => return Ok(None),
        };
        Ok(Some(value))
    }

    fn step(&mut self, op: u8) -> Result<(), String> {
        if let Some(value) = self.value(op)? {
            self.push(value);
            return Ok(());
        }
        match op {
            // The protocol's number, and the length of a frame.
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'(' => self.stack.push(Slot::Mark),
            b'0' => drop(self.stack.pop()),
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(Slot::Value(top));
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set_items(&items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            // Without a number, the next one.
            0x94 => self.remember(self.memo.len() as u64)?,
            b'q' | b'r' => {
                let key = self.number(if op == b'q' { 1 } else { 4 })?;
                self.remember(key)?;
            }
            b'h' | b'j' => {
                let key = self.number(if op == b'h' { 1 } else { 4 })?;
                self.recall(key)?;
            }
            b'p' | b'g' => {
                let line = self.line()?;
                let key = line.parse().map_err(|_| "a number of a value is wrong".to_owned())?;
                if op == b'p' { self.remember(key)? } else { self.recall(key)? }
            }
            b'c' | b'i' => {
                let named = format!("{}.{}", self.line()?, self.line()?);
                return Err(format!("it uses `{}`, and nothing of a pickle is run", named.escape_debug()));
            }
            0x93 | b'R' | b'b' | 0x81 | 0x92 | b'o' | b'P' | b'Q' | 0x82..=0x84 => {
                return Err("it builds objects or calls functions, and nothing of a pickle is run".to_owned());
            }
            _ => {
                return Err(format!(
                    "it has a value that is no text, number, list or dictionary (0x{op:02x})"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `pickle.dumps({'n': 300, 'itos': {0: '\n', 1: 'é'}}, 4)` of Python 3.11.
    const PLAIN: &[u8] =
        b"\x80\x04\x95$\0\0\0\0\0\0\0}\x94(\x8c\x01n\x94M,\x01\x8c\x04itos\x94}\x94(K\0\x8c\x01\n\x94K\x01\
        \x8c\x02\xc3\xa9\x94uu.";

    #[test]
    fn plain_values_are_read() {
        let pickle = read(PLAIN).unwrap();
        assert_eq!(pickle.get(pickle.root(), "n"), Some(&Value::Int(300)));
        let itos = pickle.get(pickle.root(), "itos").unwrap();
        let entries: Vec<_> = pickle.entries(itos).collect();
        assert_eq!(entries[1], (&Value::Int(1), &Value::Text("é".to_owned())));
        for end in 0..PLAIN.len() {
            read(&PLAIN[..end]).unwrap_err();
        }
    }

    #[test]
    fn other_protocols_and_values_are_read() {
        // `pickle.dumps({'a': '\n\u20ac', 'l': ['x'], 'f': 1.5, 'b': b'y'}, 0)` of Python 3.11, without `b`.
        let first = b"(dp0\nVa\np1\nV\\u000a\\u20ac\np2\nsVl\np3\n(lp4\nVx\np5\nasVf\np6\nF1.5\ns.";
        let pickle = read(first).unwrap();
        assert_eq!(pickle.get(pickle.root(), "a"), Some(&Value::Text("\n€".to_owned())));
        let list = pickle.get(pickle.root(), "l").unwrap();
        assert_eq!(pickle.items(list).collect::<Vec<_>>(), [&Value::Text("x".to_owned())]);
        assert_eq!(pickle.get(pickle.root(), "f"), Some(&Value::Other));
        assert_eq!(read(b"}\x8c\x01bC\x01ys.").unwrap().root(), &Value::Dict(vec![(1, 2)]));
    }

    #[test]
    fn nothing_is_executed_and_nothing_grows_beyond_the_file() {
        // `os.system('id')` by protocols 0 and 4.
        for hostile in
            [&b"cos\nsystem\n(S'id'\ntR."[..], b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R."]
        {
            let error = read(hostile).unwrap_err();
            assert!(error.contains("nothing of a pickle is run"), "{error}");
        }
        // A text of 2^63 bytes, a value that was never stored, an entry without a dictionary.
        for damaged in
            [&b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa"[..], b"h\x05.", b"K\x01K\x02K\x03s.", b"u.", b"."]
        {
            read(damaged).unwrap_err();
        }
        // Lists in lists: each holds the one before it ten times.
        let mut nested = b"]q\0".to_vec();
        for level in 1..200_u8 {
            nested.extend(b"](");
            nested.extend([b'h', level - 1].repeat(10));
            nested.extend([b'e', b'q', level]);
        }
        nested.push(b'.');
        assert!(matches!(read(&nested).unwrap().root(), Value::List(items) if items.len() == 10));
    }
}
