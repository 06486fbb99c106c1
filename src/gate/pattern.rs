//! Name patterns of options.

/// Whether a name is of the pattern; `*` stands for any characters.
pub fn matches(glob: &str, name: &str) -> bool {
    let mut pieces = glob.split('*');
    let Some(mut rest) = name.strip_prefix(pieces.next().unwrap_or("")) else {
        return false;
    };
    let mut pieces: Vec<&str> = pieces.collect();
    let Some(last) = pieces.pop() else {
        return rest.is_empty();
    };
    for piece in pieces {
        match rest.find(piece) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        for (glob, name, is) in [
            ("*", "a/b-c4", true),
            ("a/b-c4", "a/b-c4", true),
            ("a/*-c4", "a/b-c4", true),
            ("a/*", "b/b-c4", false),
            ("*-c4", "a/b-c64", false),
            ("*b*c*", "a/b-c64", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(glob, name), is, "{glob} {name}");
        }
    }
}
