//! Reads the parts of a Rust file from which its dependencies on other files are computed: its `use`
//! declarations, the items that it defines, and the paths in its code. Comments, string literals and tests are
//! left out.

/// The items, imports and paths of one file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Code {
    /// Names of the items that the file defines outside of all braces, except modules.
    pub items: Vec<String>,
    /// Names that the file imports.
    pub imports: Vec<Import>,
    /// Paths with at least two segments, except those of imports.
    pub paths: Vec<Vec<String>>,
}

/// A name that a `use` declaration brings into a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Import {
    /// Name in this file; `*` for a glob import.
    pub name: String,
    /// Path from which the name is imported.
    pub path: Vec<String>,
    /// Whether the name is re-exported (`pub use`, `pub(crate) use`).
    pub exported: bool,
}

/// A word, `::`, or one other character.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    Colons,
    Other(char),
}

impl Token {
    fn is(&self, other: char) -> bool {
        *self == Self::Other(other)
    }

    fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }
}

impl Code {
    /// Reads the source text of a file.
    pub(crate) fn read(text: &str) -> Self {
        let tokens = without_tests(&tokens(text));
        let mut code = Self::default();
        let mut depth = 0_usize;
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                Token::Other('{') => depth += 1,
                Token::Other('}') => depth = depth.saturating_sub(1),
                // `use<'a>` is a bound, not a declaration.
                Token::Word(word) if word == "use" && !tokens.get(at + 1).is_some_and(|t| t.is('<')) => {
                    let end = tokens[at..].iter().position(|t| t.is(';')).map_or(tokens.len(), |n| at + n);
                    let exported = at > 0 && (tokens[at - 1].word() == Some("pub") || tokens[at - 1].is(')'));
                    let mut imports = Vec::new();
                    expand(&tokens[at + 1..end], &mut 0, &[], &mut imports);
                    code.imports.extend(imports.into_iter().map(|import| Import { exported, ..import }));
                    at = end;
                }
                Token::Word(word) => {
                    if depth == 0 {
                        code.items.extend(defined(word, &tokens[at + 1..]));
                    }
                    let path = path(&tokens[at..]);
                    if path.len() > 1 {
                        at += 2 * (path.len() - 1);
                        code.paths.push(path);
                    }
                }
                Token::Colons | Token::Other(_) => {}
            }
            at += 1;
        }
        code
    }
}

/// Returns the name of the item whose definition begins with `keyword`.
fn defined(keyword: &str, rest: &[Token]) -> Option<String> {
    let name = match keyword {
        "struct" | "enum" | "union" | "trait" | "fn" | "const" | "static" | "type" => rest.first()?.word()?,
        "macro_rules" => rest.get(1)?.word()?,
        _ => return None,
    };
    // In `const fn`, `static mut` and similar, the word after the keyword is not the name.
    (!["fn", "mut", "unsafe", "extern", "async"].contains(&name)).then(|| name.to_owned())
}

/// Returns the longest path at the beginning of `tokens`.
fn path(tokens: &[Token]) -> Vec<String> {
    let mut segments = Vec::new();
    let mut rest = tokens;
    while let Some((Token::Word(word), after)) = rest.split_first() {
        segments.push(word.clone());
        match after.split_first() {
            Some((Token::Colons, after)) => rest = after,
            _ => break,
        }
    }
    segments
}

/// Appends to `found` the names that one `use` tree imports, and moves `at` to the end of the tree.
fn expand(tokens: &[Token], at: &mut usize, prefix: &[String], found: &mut Vec<Import>) {
    let mut path = prefix.to_vec();
    while let Some(token) = tokens.get(*at) {
        *at += 1;
        match token {
            Token::Colons => {}
            Token::Word(word) if word == "as" => {
                let name = tokens.get(*at).and_then(Token::word).unwrap_or("_").to_owned();
                *at += 1;
                found.push(Import { name, path, exported: false });
                return;
            }
            Token::Word(word) => path.push(word.clone()),
            Token::Other('*') => {
                found.push(Import { name: "*".to_owned(), path, exported: false });
                return;
            }
            Token::Other('{') => {
                while tokens.get(*at).is_some_and(|token| !token.is('}')) {
                    match &tokens[*at] {
                        Token::Other(c) if !['{', '*'].contains(c) => *at += 1,
                        _ => expand(tokens, at, &path, found),
                    }
                }
                *at += 1;
                return;
            }
            Token::Other(_) => {
                *at -= 1;
                break;
            }
        }
    }
    if path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    let Some(name) = path.last().cloned() else { return };
    found.push(Import { name, path, exported: false });
}

/// Returns the tokens without the items that are marked `#[cfg(test)]`.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let is_mark = |window: &[Token]| {
        let words: Vec<_> = window.iter().filter_map(Token::word).collect();
        window[0].is('#') && words == ["cfg", "test"] && window[6].is(']')
    };
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if tokens.get(at..at + 7).is_some_and(is_mark) {
            at = after_item(tokens, at + 7);
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Returns the index of the token after an item, field or variant: after its `;`, its `,` or its closing brace.
fn after_item(tokens: &[Token], from: usize) -> usize {
    let mut depth = 0_usize;
    for (i, token) in tokens.iter().enumerate().skip(from) {
        match token {
            Token::Other('{' | '(' | '[') => depth += 1,
            Token::Other('}' | ')' | ']') => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token.is('}') {
                    return i + 1;
                }
            }
            Token::Other(';' | ',') if depth == 0 => return i + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Returns the tokens of a Rust source text. Comments, string and character literals, and lifetimes are left
/// out.
fn tokens(text: &str) -> Vec<Token> {
    let bytes: Vec<char> = text.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&here) = bytes.get(at) {
        let next = bytes.get(at + 1).copied();
        if here == '/' && next == Some('/') {
            at = find(&bytes, at, |c| c == '\n');
        } else if here == '/' && next == Some('*') {
            at = after_block_comment(&bytes, at);
        } else if here == '"' {
            at = after_text(&bytes, at);
        } else if here == '\'' {
            at = after_quote(&bytes, at);
        } else if here.is_alphabetic() || here == '_' {
            let end = find(&bytes, at, |c| !c.is_alphanumeric() && c != '_');
            let word: String = bytes[at..end].iter().collect();
            at = end;
            if ["r", "br", "cr"].contains(&word.as_str()) && matches!(bytes.get(at), Some('"' | '#')) {
                at = after_raw_text(&bytes, at);
            } else {
                tokens.push(Token::Word(word));
            }
        } else if here == ':' && next == Some(':') {
            tokens.push(Token::Colons);
            at += 2;
        } else {
            if !here.is_whitespace() {
                tokens.push(Token::Other(here));
            }
            at += 1;
        }
    }
    tokens
}

/// Returns the index of the next character that is `wanted`, or the length of the text.
fn find(text: &[char], from: usize, wanted: impl Fn(char) -> bool) -> usize {
    text[from..].iter().position(|&c| wanted(c)).map_or(text.len(), |n| from + n)
}

fn after_block_comment(text: &[char], from: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = from;
    while at < text.len() {
        match text[at..] {
            ['/', '*', ..] => depth += 1,
            ['*', '/', ..] => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            break;
        }
    }
    at
}

fn after_text(text: &[char], from: usize) -> usize {
    let mut at = from + 1;
    while let Some(&c) = text.get(at) {
        at += if c == '\\' { 2 } else { 1 };
        if c == '"' {
            break;
        }
    }
    at
}

/// Returns the index after a raw string literal, or after the `#` of a raw identifier.
fn after_raw_text(text: &[char], from: usize) -> usize {
    let quote = find(text, from, |c| c != '#');
    if text.get(quote) != Some(&'"') {
        return quote;
    }
    let hashes = quote - from;
    let mut at = quote + 1;
    while at < text.len() {
        let closes = text[at] == '"' && text[at + 1..].iter().take_while(|&&c| c == '#').count() >= hashes;
        at += 1;
        if closes {
            return at + hashes;
        }
    }
    at
}

/// Returns the index after a character literal, or after the quote of a lifetime.
fn after_quote(text: &[char], from: usize) -> usize {
    match (text.get(from + 1), text.get(from + 2)) {
        (Some('\\'), _) => find(text, from + 3, |c| c == '\'') + 1,
        (Some(_), Some('\'')) => from + 3,
        _ => from + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split("::").map(str::to_owned).collect()
    }

    #[track_caller]
    fn imports(text: &str, expected: &[(&str, &str, bool)]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|&(name, path, exported)| Import { name: name.to_owned(), path: words(path), exported })
            .collect();
        assert_eq!(Code::read(text).imports, expected);
    }

    #[test]
    fn trees_of_imports_are_expanded() {
        imports("use crate::a::B;", &[("B", "crate::a::B", false)]);
        imports(
            "pub(crate) use super::a::{self, b::{C, d as e}, F};\npub use g::*;",
            &[
                ("a", "super::a", true),
                ("C", "super::a::b::C", true),
                ("e", "super::a::b::d", true),
                ("F", "super::a::F", true),
                ("*", "g", true),
            ],
        );
    }

    #[test]
    fn items_and_paths_are_found() {
        let text = "pub(crate) const fn a() -> crate::b::C { d::E::new(1) }\nstruct F<'a>(&'a str);\n\
                    impl F { fn inner() {} }\nmacro_rules! g { () => {} }";
        let code = Code::read(text);
        assert_eq!(code.items, ["a", "F", "g"]);
        assert_eq!(code.paths, [words("crate::b::C"), words("d::E::new")]);
    }

    #[test]
    fn comments_texts_characters_and_tests_say_nothing() {
        let text = "// crate::a::B\n/* crate::c /* crate::d */ crate::e */\nfn f() { g(\"crate::h\\\"\", r#\"\" crate::i\"#, \
                    '\"', '\\'', b'{'); }\n#[cfg(test)]\nmod tests { use super::*; fn x() { crate::j::k() } }\n\
                    #[cfg(test)]\nuse crate::l::m;\nstruct N;";
        let code = Code::read(text);
        assert_eq!(code.items, ["f", "N"]);
        assert!(code.paths.is_empty() && code.imports.is_empty(), "{code:?}");
    }

    #[test]
    fn texts_that_end_too_soon_are_read() {
        for text in [
            "\"",
            "r#\"",
            "/*",
            "'",
            "use a::{b",
            "#[cfg(test)] mod",
            "r#fn",
            "use a::{<};",
            "fn f() -> impl A + use<'_> {}",
        ] {
            Code::read(text);
        }
    }
}
