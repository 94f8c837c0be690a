//! Which tokens a text may have.

use farflung_zoo::{ModelSpec, Objective, Split, Tokenizer};

use crate::{Error, Result};

/// Checks that the model has all tokens of a text, and that the text has none of the objective's own. A
/// tokenizer with more tokens than the model is no error by itself: files of tokens may use only some.
///
/// Errors: [`Error::Setting`] with the vocabulary that the objective needs, or the first id that a text should
/// not have.
pub fn check_tokens(
    splits: &[&Split],
    tokenizer: &dyn Tokenizer,
    model: &ModelSpec,
    objective: Objective,
) -> Result<()> {
    if splits.iter().any(|split| split.rows().is_some()) {
        return Ok(());
    }
    check_room(tokenizer, model, objective)?;
    if model.vocab < tokenizer.vocab_size() || objective.own_ids() > 0 {
        splits.iter().try_for_each(|split| check_split(split, tokenizer, model, objective))?;
    }
    Ok(())
}

/// Checks that the context is long enough for an objective, and that the vocabulary has ids for it that stand
/// for no text.
///
/// Errors: [`Error::Setting`] with the size that it needs.
pub fn check_room(tokenizer: &dyn Tokenizer, model: &ModelSpec, objective: Objective) -> Result<()> {
    let least = objective.least_context();
    if model.context < least {
        let (value, expected) =
            (model.context.to_string(), format!("at least {least} with the objective {objective}"));
        return Err(Error::Setting { field: "context", value, expected });
    }
    let texts = tokenizer.vocab_size() - tokenizer.spare_ids();
    let needed = texts + objective.own_ids();
    if objective.own_ids() == 0 || model.vocab >= needed {
        return Ok(());
    }
    let value = format!("{objective}, and the model has a vocabulary of {}", model.vocab);
    let expected = format!(
        "an objective without ids of its own, or a vocabulary of at least {needed}: the {texts} ids of {} that \
         stand for text, and {} of the objective",
        tokenizer.name(),
        objective.own_ids()
    );
    Err(Error::Setting { field: "objective", value, expected })
}

fn check_split(
    split: &Split,
    tokenizer: &dyn Tokenizer,
    model: &ModelSpec,
    objective: Objective,
) -> Result<()> {
    let own = model.vocab - objective.own_ids();
    let mut tokens = Vec::new();
    for start in (0..split.len()).step_by(model.context) {
        tokens.clear();
        split.append_to(start, model.context.min(split.len() - start), &mut tokens);
        let Some(token) = tokens.iter().find(|token| **token as usize >= own) else { continue };
        let name = tokenizer.name();
        if *token as usize >= model.vocab {
            let value = format!("{name}, and the data has its token {token}");
            let expected = format!("one for a vocabulary of {}, the model's", model.vocab);
            return Err(Error::Setting { field: "tokenizer", value, expected });
        }
        let value = format!("{objective}, and the data has the token {token} of {name}");
        let expected = format!("data without the ids from {own} on, which are the objective's own");
        return Err(Error::Setting { field: "objective", value, expected });
    }
    Ok(())
}
