//! Sequences of each objective, taken apart again.

use super::*;

fn denoising(objective: Objective, context: usize) -> Denoising {
    Denoising::new(objective, 5, context, 400).unwrap()
}

fn window(context: usize) -> Vec<u32> {
    (0..=context as u32).map(|i| i * 7 % 290).collect()
}

/// Puts the spans of a sequence back to where they were taken out.
fn restored(Denoised { tokens, prefix }: &Denoised, vocab: usize) -> Vec<u32> {
    let is_sentinel = |token: u32| token as usize >= vocab - SENTINELS;
    let spans: Vec<&[u32]> = tokens[*prefix..].split(|&token| is_sentinel(token)).collect();
    assert!(spans[0].is_empty() && spans[spans.len() - 1].is_empty(), "{tokens:?}");
    let mut spans = spans[1..].iter();
    let mut all = Vec::new();
    for &token in &tokens[1..*prefix] {
        if is_sentinel(token) {
            all.extend_from_slice(spans.next().unwrap());
        } else {
            all.push(token);
        }
    }
    assert_eq!(spans.len(), 1);
    all
}

#[test]
fn a_window_is_divided_anywhere() {
    let (of, window) = (denoising(Objective::PrefixLm, 12), window(12));
    let mut ends = [0; 14];
    for offset in 0..6000 {
        let found = of.sequence(offset, &window);
        assert_eq!(found.tokens, window);
        assert_eq!(found.prefix - 1..found.tokens.len() - 1, of.targets(offset));
        ends[found.prefix] += 1;
    }
    assert_eq!((ends[0], ends[13]), (0, 0));
    assert!(ends[1..13].iter().all(|&count| (400..600).contains(&count)), "{ends:?}");
}

#[test]
fn the_mixture_has_its_shares_and_loses_nothing() {
    for context in [8, 9, 33, 512, 1024] {
        let (of, window) = (denoising(Objective::Ul2, context), window(context));
        let mut modes = [0; 3];
        for offset in 0..2000 {
            let found = of.sequence(offset, &window);
            assert_eq!(found, of.sequence(offset, &window));
            assert!(found.tokens.len() <= context + 1, "{context}");
            assert_eq!(found.prefix - 1..found.tokens.len() - 1, of.targets(offset), "{context}");
            let mode = Mode::ALL.into_iter().position(|mode| mode.id(400) == found.tokens[0]).unwrap();
            modes[mode] += 1;
            let all = match Mode::ALL[mode] {
                Mode::Sequential => found.tokens[1..].to_vec(),
                _ => restored(&found, 400),
            };
            assert_eq!(all, window[..all.len()], "{context}");
            // A sequence is as long as the rounding of two counts lets it be.
            assert!(found.tokens.len() + 3 > context, "{context}: {}", found.tokens.len());
        }
        assert!((900..1100).contains(&modes[1]), "{context}: {modes:?}");
        assert!((420..580).contains(&modes[0]) && (420..580).contains(&modes[2]), "{context}: {modes:?}");
    }
}

#[test]
fn ids_of_the_objective_end_the_vocabulary() {
    let ids: Vec<u32> = Mode::ALL.into_iter().map(|mode| mode.id(400)).collect();
    assert_eq!((ids, sentinel(400, 0), sentinel(400, 99)), (vec![299, 298, 297], 399, 300));
    assert_eq!((Objective::Ul2.own_ids(), Objective::Ul2.begins_with(400)), (103, Some(298)));
    let message = Denoising::new(Objective::Ul2, 1, 64, 103).unwrap_err().to_string();
    assert!(message.contains("vocab") && message.contains("104"), "{message}");
    let message = Denoising::new(Objective::Ul2, 1, 7, 400).unwrap_err().to_string();
    assert!(message.contains("context") && message.contains("at least 8"), "{message}");
    for objective in Objective::ALL {
        assert_eq!(objective.to_string().parse(), Ok(objective));
    }
    assert_eq!("prefix".parse::<Objective>(), Err(NoObjective));
}
