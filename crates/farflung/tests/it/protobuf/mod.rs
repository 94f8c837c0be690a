//! A reader of protobuf's wire format, written from its definition: for messages that this project writes by
//! other means.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

/// A field's value.
#[derive(Debug, Clone, PartialEq)]
#[allow(dead_code, reason = "each test reads its messages")]
pub(crate) enum Value {
    Varint(u64),
    Fixed64(u64),
    Bytes(Vec<u8>),
    Fixed32(u32),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let (byte, rest) = bytes.split_first().expect("a number has an end");
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// Returns the fields of a message, in order.
pub(crate) fn fields(mut bytes: &[u8]) -> Vec<(u64, Value)> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let mut take = |count: usize| {
            let (taken, rest) = bytes.split_at(count);
            bytes = rest;
            taken.to_vec()
        };
        let value = match key & 7 {
            0 => Value::Varint(varint(&mut bytes)),
            1 => Value::Fixed64(u64::from_le_bytes(take(8).try_into().unwrap())),
            2 => {
                let count = varint(&mut bytes);
                let (taken, rest) = bytes.split_at(usize::try_from(count).unwrap());
                bytes = rest;
                Value::Bytes(taken.to_vec())
            }
            5 => Value::Fixed32(u32::from_le_bytes(take(4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

/// Returns the values of a field of bytes, texts or messages.
pub(crate) fn all(message: &[u8], number: u64) -> Vec<Vec<u8>> {
    let found = fields(message).into_iter().filter(|(field, _)| *field == number);
    found.filter_map(|(_, value)| if let Value::Bytes(bytes) = value { Some(bytes) } else { None }).collect()
}

/// Returns the last value of a numeric field, or 0 if there is none.
pub(crate) fn number(message: &[u8], number: u64) -> u64 {
    let found = fields(message).into_iter().rfind(|(field, _)| *field == number);
    match found.map(|(_, value)| value) {
        Some(Value::Varint(value) | Value::Fixed64(value)) => value,
        Some(Value::Fixed32(value)) => value.into(),
        Some(Value::Bytes(_)) | None => 0,
    }
}

/// Returns the value of a text field.
pub(crate) fn text(message: &[u8], number: u64) -> String {
    String::from_utf8(all(message, number).concat()).unwrap()
}
